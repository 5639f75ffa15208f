"""One part alone, in the light environment: no vLLM, no torch, no Mooncake, no network."""
