"""How well the verdicts do, by what is known to be true. `tools/score.py` is the command line.

common  what must be found, what was found, how it is counted, and how a table is written
corpus  the logs in tests/incidents, which were scripted after public reports
store   simulated engines with the store connector
pd      simulated prefills and a decode
engine  real engines, to which something was done from outside
"""
