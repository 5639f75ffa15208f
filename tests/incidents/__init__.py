"""The corpus: recorded and scripted logs with the verdict each must reach. Never regenerated to make a test pass."""
