"""The simulator's parts.

vLLM's scheduler and the plugin's code are real; workers, GPU memory and store are simulated, in virtual time.

    plan       what happens in a run: the engine's shape and a list of decisions, drawn from a seed; knows no vLLM
    clock      virtual time, and suspended calls that wait in it; knows nothing else
    memory     whose tokens each GPU block holds, on each rank: the truth that the ledger cannot know
    store      a Mooncake store that is not there: objects, faults, and the moments at which bytes move
    workers    one simulated rank: upstream's and the plugin's worker code, run without threads
    company    another connector beside the plugin, under vLLM's MultiConnector
    engine     vLLM's scheduler with the plugin attached, stepped as vLLM's engine core steps it
    client     who sends, aborts and sends again, as the plan says
    checks     what must hold after every step, and at the end; shares nothing with `ledger.state.apply`
    canaries   known mistakes, switched on here and nowhere else, to prove that the checks can fail
    run        one run from a plan to a result
    shrink     the smallest plan that still fails

`tools/simulate.py` is the command line. Nothing here reads a clock, starts a thread, or sleeps.
"""

import os

# vLLM reads these when it is imported.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
