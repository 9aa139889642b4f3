"""Ids of calls and names of tools of any length: a model makes them. SQLite never held them to one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0002"
down_revision = "v0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Widen the two columns."""
    if op.get_bind().dialect.name != "sqlite":
        for name in ("call_id", "tool_name"):
            op.alter_column("spans", name, type_=sa.Text(), existing_type=sa.String(200), existing_nullable=True)
