"""The simulators' parts. `tools/simulate.py` is the command line.

vLLM's schedulers and the plugin's code are real; what is around them is simulated, in virtual time. There are two
rooms; what both share stands here.

    store/   one engine with the store connector, its clients, workers, GPU memory and store
    pd/      prefill engines and a decode with the P/D connector, and the network between them

    plans    what a plan is, and the dice that it is drawn with
    engines  vLLM's scheduler, its tiny model, and a step of it
    step     a request in a step of the model
    check    what a failed check says, and how it is counted
    canary   what a known mistake is
    result   what comes of a run
    clock    virtual time, and suspended calls that wait in it; knows nothing else
    shrink   the smallest plan that still fails
    many     many seeds: processes, and logs as files

Nothing here reads a clock, starts a thread, or sleeps.
"""

import os

# vLLM reads these when it is imported.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
