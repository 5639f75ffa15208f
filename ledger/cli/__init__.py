"""The command line.

commands   parses, calls the library, prints
types      what an argument names: a moment, a block, a job
terminal   streams, widths, progress, and the message of each error
"""
