"""Simulated P/D: prefill engines, a decode engine and the network between them, in virtual time.

Real: vLLM's schedulers and block pools, `KVOutputAggregator`, and both halves of the P/D connector, upstream's and the
plugin's, down to the bytes of their messages and the addresses of each copy. Upstream's workers run on event loops;
here these are `loop.VirtualLoop`s, on which a second takes no time. Modelled: sockets, the bootstrap servers and the
transfer engine (`wire`), the GPU memory and the model (`memory`), the constructors of the workers, which need a device
(`engine`), and the log's writer: logs stay in memory.

    plan      what happens in a run, drawn from a seed
    run       one run, from a plan to a result
    checks    what must hold after every step
    canaries  known mistakes that the checks must find
"""
