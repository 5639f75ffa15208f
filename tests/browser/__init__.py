"""Pages as an operator sees them, in a headless Chromium."""
