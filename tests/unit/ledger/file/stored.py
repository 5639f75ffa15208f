"""What a file holds, for tests that compare."""

import sqlite3

from ledger.file.read import open_log


def lines(path) -> list[tuple[int, bytes]]:
    """Place and line of each event."""
    with open_log(path) as log:
        return [row for page in log.pages() for row in page.rows]


def rows(path, query: str) -> list[tuple]:
    """The rows of a query, read beside kvledger."""
    connection = sqlite3.connect(path)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()
