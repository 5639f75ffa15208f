"""A log drawn for the trace viewer Perfetto."""
