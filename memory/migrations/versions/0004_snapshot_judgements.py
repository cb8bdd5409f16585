"""Snapshots cover judgements as well. What is there was named without them, and keeps its name."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("memory_snapshot", sa.Column("judgements", sa.BigInteger().with_variant(sa.Integer, "sqlite")))
