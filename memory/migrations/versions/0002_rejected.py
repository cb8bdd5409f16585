"""Rejected writes are kept, with the reason and how often each was tried."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "memory_rejection",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("times", sa.Integer, nullable=False),
        sa.Column("time", sa.String, nullable=False),
    )
    op.create_index("memory_rejection_id", "memory_rejection", ["id"])
