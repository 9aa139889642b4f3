"""The tables of the store. The first migration makes the same ones; a test compares them.

Turns form a tree: each names the one before it, and a chain names its last. A fork therefore copies nothing but a reference,
and going back is naming an earlier turn. Rows of turns and of their spans never change; what a branch did to a span (pruned,
pinned, was due) is kept by chain.
"""

from __future__ import annotations

import re

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.engine import Dialect

metadata = MetaData()
Key = BigInteger().with_variant(Integer(), "sqlite")  # SQLite counts up INTEGER keys only
Name = Text().with_variant(String(200), "sqlite")  # which holds nothing to a length, and is spared a copy of its table


class AnyText(TypeDecorator[str]):
    """Text with zeros in it, which PostgreSQL has no place for: there it is the character 1 and a "0", and a 1 of its own
    stands twice."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """As it is written."""
        if value is None or dialect.name != "postgresql":
            return value
        return value.replace("\x01", "\x01\x01").replace("\0", "\x010")

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        """As it was given."""
        if value is None or dialect.name != "postgresql":
            return value
        return re.sub("\x01(.)", lambda found: "\0" if found[1] == "0" else found[1], value, flags=re.DOTALL)


sessions = Table(
    "sessions",
    metadata,
    Column("id", String(200), primary_key=True),
    Column("tenant", String(200), nullable=False),
    Column("chain_id", String(200), nullable=False),  # the one that `load` opens
    Column("created", Float, nullable=False),
    Index("ix_sessions_tenant", "tenant"),
)

turns = Table(
    "turns",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("parent", Key, ForeignKey("turns.id"), nullable=True),
    Column("number", Integer, nullable=False),
    Column("length", Integer, nullable=False),  # tokens of this turn
    Column("ids", LargeBinary, nullable=False),
    Column("answer", Text, nullable=False),
    Column("created", Float, nullable=False),
    Index("ix_turns_parent", "parent"),
)

chains = Table(
    "chains",
    metadata,
    Column("id", String(200), primary_key=True),
    Column("session_id", String(200), ForeignKey("sessions.id"), nullable=False),
    Column("parent", String(200), nullable=True),
    Column("head", Key, ForeignKey("turns.id"), nullable=True),
    Column("turns", Integer, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("closed", Boolean, nullable=False),
    Column("model", Text, nullable=False),
    Column("settings", Text, nullable=False),
    Column("usage", Text, nullable=False),
    Column("created", Float, nullable=False),
    Column("updated", Float, nullable=False),
    Index("ix_chains_session", "session_id"),
    Index("ix_chains_head", "head"),
)

spans = Table(
    "spans",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("span_id", String(64), nullable=False),
    Column("chain_id", String(200), nullable=True),  # set while pending
    Column("turn", Key, ForeignKey("turns.id"), nullable=True),  # set once committed
    Column("number", Integer, nullable=False),  # of the turn
    Column("message", Integer, nullable=False),
    Column("kind", String(20), nullable=False),
    Column("text", AnyText, nullable=False),
    Column("first", Integer, nullable=True),  # [first, last) counts from the turn's first id, as it was rendered
    Column("last", Integer, nullable=True),
    Column("call_id", Name, nullable=True),
    Column("tool_name", Name, nullable=True),
    Column("call", Text, nullable=True),
    Column("answers", Integer, nullable=True),
    Column("lag", Integer, nullable=True),
    Column("keep", String(40), nullable=False),
    Column("error", Boolean, nullable=False),
    Index("ix_spans_chain", "chain_id", "span_id"),
    Index("ix_spans_turn", "turn"),
)

prunes = Table(
    "prunes",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("chain_id", String(200), ForeignKey("chains.id"), nullable=False),
    Column("span_id", String(64), nullable=False),
    Column("mode", String(20), nullable=False),
    Column("keep", String(40), nullable=False),
    Column("boundary", Integer, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("why", Text, nullable=False),
    Column("placeholder", LargeBinary, nullable=False),
    Column("created", Float, nullable=False),
    UniqueConstraint("chain_id", "span_id", name="uq_prunes"),
)

marks = Table(
    "marks",
    metadata,
    Column("chain_id", String(200), ForeignKey("chains.id"), primary_key=True),
    Column("span_id", String(64), primary_key=True),
    Column("mark", String(20), primary_key=True),  # pinned | due | lag
    Column("value", Integer, nullable=True),
)

requests = Table(
    "requests",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("chain_id", String(200), ForeignKey("chains.id"), nullable=False),
    Column("turn", Integer, nullable=False),
    Column("outcome", String(40), nullable=False),
    Column("usage", Text, nullable=False),
    Column("miss", Text, nullable=True),
    Column("milliseconds", Float, nullable=False),
    Column("created", Float, nullable=False),
    Index("ix_requests_chain", "chain_id"),
)
