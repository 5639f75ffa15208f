"""The stored queries: what operators ask first, as SQL over a sealed file and what browsing adds to it.

Each stays within Datasette's default limits (one second, 1,000 rows) on a log of a million events;
`tools/bench/browse.py` measures it. Columns keep the names that they have in the tables, so that `ledger.browse.cells`
shows them the same everywhere. Pure text; this file knows the tables by name.
"""

import msgspec

STORY_EVENTS = 1_000
"""Events of a story: Datasette's own limit of rows."""


STORY_REQUESTS = 20
"""Requests that the beginning of an id may mean: more is no story."""


class Query(msgspec.Struct, frozen=True):
    """A stored query.

    Attributes:
        name: its place in an address; never changed, because people keep links.
        needs: the tables that it reads. A file without one of them is not asked.
        parameters: what it asks the reader for.
    """

    name: str
    title: str
    description: str
    sql: str
    needs: frozenset[str]
    parameters: tuple[str, ...] = ()


QUERIES: tuple[Query, ...] = (
    Query(
        "what_went_wrong",
        "What went wrong",
        "The findings of kvledger replay, incident by incident. None: nothing wrong was found.",
        """
SELECT incident, part, certainty, kind, title, culprit, advice, code, requests, jobs, ranks, blocks, since_seq, evidence
FROM findings
ORDER BY place
""",
        frozenset({"findings"}),
    ),
    Query(
        "open_at_end",
        "What is open at the end",
        "Store jobs, loads, P/D transfers and requests that had not ended: since when, who has not answered, what "
        "they hold.",
        """
SELECT what, job, load, transfer, request, generation, state, waits_for, held_blocks, open_ns, since_ts_ns, since_seq
FROM open_work
ORDER BY what = 'request', open_ns DESC
""",
        frozenset({"open_work"}),
    ),
    Query(
        "slowest_transfers",
        "Slowest transfers",
        "The 100 calls to the store or to a peer that took longest. A call that has not returned counts until the end "
        "of the log, by the wall clocks of both hosts.",
        """
WITH last AS (SELECT ts_ns FROM events ORDER BY seq DESC LIMIT 1)
SELECT
  coalesce(duration_ns, last.ts_ns - started_ts_ns) AS duration_ns, op, coalesce(outcome, 'not returned') AS outcome,
  transfer, peer, rank, request, job, load, keys, bytes,
  CASE WHEN duration_ns > 0 THEN bytes * 1000000000 / duration_ns END AS bytes_per_s,
  failed_keys, code, exception, started_ts_ns, first_seq
FROM transfers, last
ORDER BY 1 DESC
LIMIT 100
""",
        frozenset({"events", "transfers"}),
    ),
    Query(
        "longest_held",
        "Jobs and loads that took longest",
        "From registered to settled: how long a job kept its blocks pinned, and how long a request waited for a load.",
        """
SELECT * FROM (
  SELECT
    duration_ns, 'store job' AS what, job, NULL AS load, request, generation, blocks, tokens, ranks,
    CASE WHEN ranks_failed > 0 THEN ranks_failed || ' ranks failed' ELSE 'settled' END AS outcome, code,
    registered_ts_ns AS since_ts_ns, registered_seq AS since_seq
  FROM jobs WHERE duration_ns IS NOT NULL ORDER BY duration_ns DESC LIMIT 50)
UNION ALL
SELECT * FROM (
  SELECT
    duration_ns, 'load', NULL, load, request, generation, blocks, tokens, ranks, outcome, code,
    planned_ts_ns, planned_seq
  FROM loads WHERE duration_ns IS NOT NULL ORDER BY duration_ns DESC LIMIT 50)
ORDER BY duration_ns DESC
""",
        frozenset({"jobs", "loads"}),
    ),
    Query(
        "failures",
        "Failures by code and rank",
        "What ranks and peers reported, and what calls to the store returned. One fault often shows in both.",
        """
WITH told AS (
  SELECT
    code, data ->> '$.exception' AS exception, rank, kind, data ->> '$.stage' AS stage, 1 AS times, ts_ns, seq
  FROM events
  -- These two repeat the first report of a load or a transfer.
  WHERE code IS NOT NULL AND kind NOT IN ('load_failed', 'recv_failed', 'transfer_finished')
  UNION ALL
  SELECT code, exception, rank, 'transfer_finished', op, max(failed_keys, 1), finished_ts_ns, first_seq
  FROM transfers
  WHERE outcome <> 'ok'
)
SELECT
  code, exception, rank, kind, stage, sum(times) AS times, count(*) AS events, min(ts_ns) AS first_ts_ns,
  max(ts_ns) AS last_ts_ns, min(seq) AS first_seq, code AS meaning
FROM told
GROUP BY code, exception, rank, kind, stage
ORDER BY events DESC, code, rank
LIMIT 1000
""",
        frozenset({"events", "transfers"}),
    ),
    Query(
        "pins_over_time",
        "Pins over time",
        "How much was pinned and open at the most, in each of a few hundred intervals of the log.",
        """
WITH opened AS (SELECT nullif(data ->> '$.num_blocks', 0) AS blocks FROM events WHERE kind = 'log_opened' LIMIT 1)
SELECT
  from_ts_ns, pinned_blocks, pinned_blocks * 100.0 / (SELECT blocks FROM opened) AS pinned_percent, open_jobs,
  loading_blocks, open_loads, transfer_blocks, open_transfers, requests, preemptions, failures, first_seq
FROM timeline
ORDER BY first_seq
""",
        frozenset({"events", "timeline"}),
    ),
    Query(
        "preemptions",
        "Requests by preemptions",
        "The requests that lost their blocks most often.",
        """
WITH preempted AS (
  SELECT request, count(*) AS preemptions, min(ended_ts_ns) AS first_ts_ns, max(ended_ts_ns) AS last_ts_ns
  FROM requests
  WHERE "end" = 'preempted'
  GROUP BY request
  ORDER BY preemptions DESC
  LIMIT 500
)
SELECT
  request, preemptions, first_ts_ns, last_ts_ns,
  (SELECT count(*) FROM jobs WHERE jobs.request = preempted.request) AS store_jobs,
  (SELECT count(*) FROM loads WHERE loads.request = preempted.request) AS loads,
  (SELECT coalesce("end", 'open') FROM requests AS life WHERE life.request = preempted.request
   ORDER BY first_seq DESC LIMIT 1) AS outcome
FROM preempted
ORDER BY preemptions DESC, first_ts_ns
""",
        frozenset({"requests", "jobs", "loads"}),
    ),
    Query(
        "request_story",
        "The story of one request",
        "All events of a request, its jobs and its loads. Give its id, or how it begins: vLLM adds to the id that a "
        f"client knows. The first {STORY_EVENTS:,} events.",
        f"""
WITH
  exact AS (SELECT request FROM events WHERE request = :request LIMIT 1),
  named AS (
    SELECT request FROM exact
    UNION
    SELECT * FROM (
      SELECT DISTINCT request FROM requests
      WHERE :request <> '' AND request >= :request AND request < :request || char(1114111)
        AND NOT EXISTS (SELECT 1 FROM exact)
      LIMIT {STORY_REQUESTS}
    )
  ),
  places AS (
    SELECT seq FROM events WHERE request IN (SELECT request FROM named)
    UNION
    SELECT events.seq FROM jobs JOIN events ON events.job = jobs.job
    WHERE jobs.request IN (SELECT request FROM named)
    UNION
    SELECT events.seq FROM loads JOIN events ON events.load = loads.load
    WHERE loads.request IN (SELECT request FROM named)
    ORDER BY seq
    LIMIT {STORY_EVENTS}
  )
SELECT seq, ts_ns, source, step, kind, request, generation, job, load, transfer, rank, code, data
FROM places JOIN events USING (seq)
ORDER BY seq
""",  # noqa: S608 - a number of ours
        frozenset({"events", "requests", "jobs", "loads"}),
        ("request",),
    ),
    Query(
        "block_story",
        "The story of one block",
        "Who pinned it, read it, wrote it, gave it up. A block is a group and a number; no group means group 0. "
        f"The last {STORY_EVENTS:,} events.",
        f"""
WITH places AS (
  SELECT DISTINCT seq
  FROM block_ranges
  WHERE block_group = CAST(coalesce(nullif(:group, ''), 0) AS INTEGER)
    AND :block <> '' AND first_block <= CAST(:block AS INTEGER) AND last_block >= CAST(:block AS INTEGER)
  ORDER BY seq DESC
  LIMIT {STORY_EVENTS}
)
SELECT seq, ts_ns, source, kind, request, generation, job, load, transfer, rank, code, data
FROM places JOIN events USING (seq)
ORDER BY seq
""",  # noqa: S608 - a number of ours
        frozenset({"events", "block_ranges"}),
        ("group", "block"),
    ),
    Query(
        "losses",
        "Gaps and losses",
        "Where the log lacks something: events that were dropped, and an end without log_closed.",
        """
SELECT seq, ts_ns, data ->> '$.origin' AS source, data ->> '$.dropped' AS dropped_events,
  data ->> '$.first_ts_ns' AS first_ts_ns, data ->> '$.last_ts_ns' AS last_ts_ns, data ->> '$.reason' AS reason
FROM events
WHERE kind = 'gap'
UNION ALL
SELECT last.seq, last.ts_ns, NULL, NULL, NULL, NULL,
  CASE seal."end"
    WHEN 'live' THEN 'the engine was still writing when the log was sealed'
    ELSE 'no log_closed: the process ended hard, its disk took nothing more, or the copy lacks the end'
  END
FROM seal, (SELECT seq, ts_ns FROM events ORDER BY seq DESC LIMIT 1) AS last
WHERE seal."end" <> 'closed'
""",
        frozenset({"events", "seal"}),
    ),
    Query(
        "alarms",
        "What the engine itself reported",
        "Broken rules, suspected stalls, blocks that changed under a put, results that came too late, lookups that "
        "were answered with no hit to break a loop.",
        """
SELECT seq, ts_ns, kind, request, job, load, transfer, rank, data
FROM events
WHERE kind IN ('invariant_violated', 'stall_suspected', 'poison_caught', 'report_ignored', 'lookup_suppressed')
ORDER BY seq
LIMIT 1000
""",
        frozenset({"events"}),
    ),
)
"""All of them, in the order in which an operator asks."""
