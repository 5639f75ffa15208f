"""The P/D connector: sends and receives between prefill and decode engines."""
