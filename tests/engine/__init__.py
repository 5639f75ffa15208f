"""Real vLLM and real Mooncake on the CPU, over TCP on loopback."""
