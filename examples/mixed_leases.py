# /// script
# requires-python = ">=3.10"
# dependencies = ["psycopg[binary]>=3.1"]
# ///
"""Keep the leases in etcd, and the fence in PostgreSQL, where the business data lives.

It takes its two classes from etcd_leases.py and postgres_leases.py, which lie beside it, and needs
both servers, named by ETCDCTL_ENDPOINTS and by libpq's variables:

    python3 run_experiment.py --store examples/mixed_leases.py --check results.json

`take_over` and `reconcile` are leases.py's own and work across the two: the sink never reads the
lease table, and the lease table never learns what was written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import etcd_leases
import postgres_leases
from etcd_leases import LeaseTable
from postgres_leases import FencedSink

__all__ = ["FencedSink", "LeaseTable", "fresh"]


@contextmanager
def fresh() -> Iterator[tuple[str, str]]:
    """Give an empty location in each of the two servers, and remove both afterwards."""
    with etcd_leases.fresh() as (leases, _), postgres_leases.fresh() as (_, sink):
        yield leases, sink
