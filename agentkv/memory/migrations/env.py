"""Alembic's entry: runs the migrations on the connection that the store hands over, in the store's transaction."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
