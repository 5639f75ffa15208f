"""Browsing a log in Datasette: `kvledger browse FILE`.

    server     makes a sealed copy of a log in a temporary folder and serves it on loopback
    extras     adds what only browsing needs to that copy: findings, open work, a time line, an index of blocks
    tables     those tables
    timeline   samples the book over the time of a log
    queries    the stored queries: what operators ask first
    cells      values as a person reads them, and the links between them
    pages      titles and descriptions
    plugin     Datasette's hooks

The plugin is loaded into every Datasette of an environment in which kvledger is installed. It looks at the header of
each database, and does nothing for one that is not a kvledger log.

`plugin` and what it imports are all that a foreign Datasette pays for, so they import nothing heavy.
"""
