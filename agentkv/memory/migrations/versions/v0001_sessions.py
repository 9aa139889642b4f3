"""Sessions, chains, turns, spans, prunes, marks, requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0001"
down_revision = None
branch_labels = None
depends_on = None


def _key() -> sa.types.TypeEngine[int]:
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(200), primary_key=True),
        sa.Column("tenant", sa.String(200), nullable=False),
        sa.Column("chain_id", sa.String(200), nullable=False),
        sa.Column("created", sa.Float, nullable=False),
    )
    op.create_index("ix_sessions_tenant", "sessions", ["tenant"])
    op.create_table(
        "turns",
        sa.Column("id", _key(), primary_key=True, autoincrement=True),
        sa.Column("parent", _key(), sa.ForeignKey("turns.id"), nullable=True),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("length", sa.Integer, nullable=False),
        sa.Column("ids", sa.LargeBinary, nullable=False),
        sa.Column("answer", sa.Text, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
    )
    op.create_index("ix_turns_parent", "turns", ["parent"])
    op.create_table(
        "chains",
        sa.Column("id", sa.String(200), primary_key=True),
        sa.Column("session_id", sa.String(200), sa.ForeignKey("sessions.id"), nullable=False),
        sa.Column("parent", sa.String(200), nullable=True),
        sa.Column("head", _key(), sa.ForeignKey("turns.id"), nullable=True),
        sa.Column("turns", sa.Integer, nullable=False),
        sa.Column("tokens", sa.Integer, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("closed", sa.Boolean, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("settings", sa.Text, nullable=False),
        sa.Column("usage", sa.Text, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("updated", sa.Float, nullable=False),
    )
    op.create_index("ix_chains_session", "chains", ["session_id"])
    op.create_index("ix_chains_head", "chains", ["head"])
    _spans()
    _by_chain()


def _spans() -> None:
    op.create_table(
        "spans",
        sa.Column("id", _key(), primary_key=True, autoincrement=True),
        sa.Column("span_id", sa.String(64), nullable=False),
        sa.Column("chain_id", sa.String(200), nullable=True),
        sa.Column("turn", _key(), sa.ForeignKey("turns.id"), nullable=True),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("message", sa.Integer, nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("first", sa.Integer, nullable=True),
        sa.Column("last", sa.Integer, nullable=True),
        sa.Column("call_id", sa.String(200), nullable=True),
        sa.Column("tool_name", sa.String(200), nullable=True),
        sa.Column("call", sa.Text, nullable=True),
        sa.Column("answers", sa.Integer, nullable=True),
        sa.Column("lag", sa.Integer, nullable=True),
        sa.Column("keep", sa.String(40), nullable=False),
        sa.Column("error", sa.Boolean, nullable=False),
    )
    op.create_index("ix_spans_chain", "spans", ["chain_id", "span_id"])
    op.create_index("ix_spans_turn", "spans", ["turn"])


def _by_chain() -> None:
    op.create_table(
        "prunes",
        sa.Column("id", _key(), primary_key=True, autoincrement=True),
        sa.Column("chain_id", sa.String(200), sa.ForeignKey("chains.id"), nullable=False),
        sa.Column("span_id", sa.String(64), nullable=False),
        sa.Column("mode", sa.String(20), nullable=False),
        sa.Column("keep", sa.String(40), nullable=False),
        sa.Column("boundary", sa.Integer, nullable=False),
        sa.Column("tokens", sa.Integer, nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("placeholder", sa.LargeBinary, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.UniqueConstraint("chain_id", "span_id", name="uq_prunes"),
    )
    op.create_table(
        "marks",
        sa.Column("chain_id", sa.String(200), sa.ForeignKey("chains.id"), primary_key=True),
        sa.Column("span_id", sa.String(64), primary_key=True),
        sa.Column("mark", sa.String(20), primary_key=True),
        sa.Column("value", sa.Integer, nullable=True),
    )
    op.create_table(
        "requests",
        sa.Column("id", _key(), primary_key=True, autoincrement=True),
        sa.Column("chain_id", sa.String(200), sa.ForeignKey("chains.id"), nullable=False),
        sa.Column("turn", sa.Integer, nullable=False),
        sa.Column("outcome", sa.String(40), nullable=False),
        sa.Column("usage", sa.Text, nullable=False),
        sa.Column("miss", sa.Text, nullable=True),
        sa.Column("milliseconds", sa.Float, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
    )
    op.create_index("ix_requests_chain", "requests", ["chain_id"])


def downgrade() -> None:
    """Drop the tables."""
    for name in ("requests", "marks", "prunes", "spans", "chains", "turns", "sessions"):
        op.drop_table(name)
