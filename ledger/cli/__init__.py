"""The command line.

commands   parses, calls the library, prints
terminal   streams, widths, progress, and what is said of an error
"""
