"""What a replay says, for a person and for a program."""
