"""Simulated store: one engine with the store connector, and everything around it, in virtual time.

Real: vLLM's scheduler and block pool, and both halves of the store connector, upstream's and the plugin's. Workers run
without threads; GPU memory, the model and the store are made up.

    plan             what happens in a run: the engine's shape and a list of decisions, drawn from a seed
    memory           whose tokens each GPU block holds, on each rank: the truth that the ledger cannot know
    objects          a Mooncake store that is not there: objects, faults, and the moments at which bytes move
    workers          one simulated rank: upstream's and the plugin's worker code, run without threads
    other_connector  another connector beside the plugin, under vLLM's MultiConnector
    engine           vLLM's scheduler with the plugin attached, stepped as vLLM's engine core steps it
    client           who sends, aborts and sends again, as the plan says
    checks           what must hold after every step, and at the end; shares nothing with `ledger.state.apply`
    checked_log      the log as a writer and a replay would see it, held to the rules of the design
    canaries         known mistakes, switched on here and nowhere else, to prove that the checks can fail
    run              one run from a plan to a result
"""
