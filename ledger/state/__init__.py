"""The book: what the scheduler knows, as a projection of the log. Live and replayed by the same code.

records      requests, jobs, loads, sends and recvs: the book as data
open_work    one view of the jobs, loads, sends and recvs that are open
counts       how many of them name each block
projection   the book with these counts, and what is asked of it
rules        how a rule of the book is written and registered
requests     what becomes of a request
store        the rules of store jobs and loads
pd           the rules of sends and recvs between prefill and decode engines
log          broken rules and stalls
apply        the way every event takes

Each file knows those above it, and none below.
"""
