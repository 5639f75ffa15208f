"""What must hold for every input: Hypothesis strategies and state machines over the pure code of ledger/."""
