"""Trajectories, items with statuses and ledger, links with evidence, judgements, snapshots."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

SEQ = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "memory_trajectory",
        sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String, nullable=False, unique=True),
        sa.Column("world", sa.String, nullable=False),
        sa.Column("grammar", sa.String, nullable=False),
        sa.Column("task", sa.String, nullable=False),
        sa.Column("task_type", sa.String, nullable=False),
        sa.Column("round", sa.Integer, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("success", sa.Boolean),
        sa.Column("score", sa.Float, nullable=False),
        sa.Column("length", sa.Integer, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "memory_item",
        sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String, nullable=False, unique=True),
        sa.Column("level", sa.Integer, nullable=False),
        sa.Column("world", sa.String, nullable=False),
        sa.Column("grammar", sa.String, nullable=False),
        sa.Column("task_type", sa.String, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("retrieved", sa.Integer, nullable=False),
        sa.Column("instantiated", sa.Integer, nullable=False),
        sa.Column("suppressed", sa.Integer, nullable=False),
        sa.Column("followed", sa.Integer, nullable=False),
        sa.Column("violated", sa.Integer, nullable=False),
        sa.Column("episodes_with", sa.Integer, nullable=False),
        sa.Column("sum_with", sa.Float, nullable=False),
        sa.Column("episodes_without", sa.Integer, nullable=False),
        sa.Column("sum_without", sa.Float, nullable=False),
    )
    op.create_index("memory_item_level", "memory_item", ["level", "status"])
    op.create_table(
        "memory_change",
        sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
        sa.Column("item", sa.String, sa.ForeignKey("memory_item.id"), nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("round", sa.Integer, nullable=False),
        sa.Column("time", sa.String, nullable=False),
    )
    op.create_index("memory_change_item", "memory_change", ["item"])
    op.create_table(
        "memory_link",
        sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String, nullable=False, unique=True),
        sa.Column("lower", sa.String, nullable=False),
        sa.Column("upper", sa.String, sa.ForeignKey("memory_item.id"), nullable=False),
        sa.Column("relation", sa.String, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
    )
    op.create_index("memory_link_lower", "memory_link", ["lower"])
    op.create_index("memory_link_upper", "memory_link", ["upper", "relation"])
    op.create_table(
        "memory_evidence",
        sa.Column("trajectory", sa.String, sa.ForeignKey("memory_trajectory.id"), primary_key=True),
        sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("link", sa.String, sa.ForeignKey("memory_link.id"), primary_key=True),
    )
    op.create_index("memory_evidence_link", "memory_evidence", ["link"])
    op.create_table(
        "memory_credit",
        sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
        sa.Column("item", sa.String, sa.ForeignKey("memory_item.id"), nullable=False),
        sa.Column("episode", sa.String, nullable=False),
        sa.Column("outcome", sa.Float),
        sa.Column("retrieved", sa.Integer, nullable=False),
        sa.Column("instantiated", sa.Integer, nullable=False),
        sa.Column("suppressed", sa.Integer, nullable=False),
        sa.Column("followed", sa.Integer, nullable=False),
        sa.Column("violated", sa.Integer, nullable=False),
        sa.UniqueConstraint("item", "episode", name="memory_credit_once"),
    )
    op.create_table(
        "memory_judgement",
        sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
        sa.Column("item", sa.String, sa.ForeignKey("memory_item.id"), nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("verdict", sa.Text, nullable=False),
        sa.Column("round", sa.Integer, nullable=False),
        sa.Column("time", sa.String, nullable=False),
    )
    op.create_index("memory_judgement_item", "memory_judgement", ["item"])
    op.create_table(
        "memory_snapshot",
        sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("label", sa.String, nullable=False),
        sa.Column("time", sa.String, nullable=False),
        sa.Column("trajectories", SEQ, nullable=False),
        sa.Column("links", SEQ, nullable=False),
        sa.Column("changes", SEQ, nullable=False),
        sa.UniqueConstraint("id", "label", name="memory_snapshot_once"),
    )
