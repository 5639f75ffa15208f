"""The file on disk: how it is made, opened, read, sealed, checked, and saved from damage."""
