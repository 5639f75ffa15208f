"""The book: what the scheduler knows, as a projection of the log. Live and replayed by the same code.

apply      requests, store jobs and loads, and the way every event takes
pd         sends and receives between prefill and decode engines
"""
