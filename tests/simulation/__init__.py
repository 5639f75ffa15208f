"""vLLM's real scheduler and block pool in a plain process, with simulated workers and a simulated store."""
