"""What several verdicts look at in the same way. A module here is no verdict of its own."""
