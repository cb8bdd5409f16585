"""SAMem: tables of states, thoughts and values, with every update, verdict and barrier."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

SEQ = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "memory_qtable",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("name", sa.String, nullable=False, unique=True),
        sa.Column("identity", sa.Text, nullable=False),
        sa.Column("words", sa.Text, nullable=False),
        sa.Column("episodes", sa.Integer, nullable=False),
        sa.Column("barriers", sa.Integer, nullable=False),
    )
    op.create_table(
        "memory_state",
        sa.Column("qtable", sa.Integer, sa.ForeignKey("memory_qtable.id"), primary_key=True, autoincrement=False),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("vector", sa.LargeBinary, nullable=False),
        sa.Column("trajectory", sa.String, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("round", sa.Integer, nullable=False),
    )
    op.create_table(
        "memory_thought",
        sa.Column("qtable", sa.Integer, sa.ForeignKey("memory_qtable.id"), primary_key=True, autoincrement=False),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("state", sa.Integer, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("vector", sa.LargeBinary),
        sa.Column("trajectory", sa.String, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("round", sa.Integer, nullable=False),
        sa.Column("value", sa.Float, nullable=False),
        sa.Column("visits", sa.Integer, nullable=False),
        sa.Column("trials", sa.Integer, nullable=False),
        sa.Column("led_on", sa.Integer, nullable=False),
        sa.Column("forgotten", sa.Boolean, nullable=False),
    )
    op.create_index("memory_thought_state", "memory_thought", ["qtable", "state"])
    op.create_table(
        "memory_q_update",
        sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
        sa.Column("qtable", sa.Integer, sa.ForeignKey("memory_qtable.id"), nullable=False),
        sa.Column("barrier", sa.Integer, nullable=False),
        sa.Column("thought", sa.Integer, nullable=False),
        sa.Column("trajectory", sa.String, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("reward", sa.Float, nullable=False),
        sa.Column("target", sa.Float, nullable=False),
        sa.Column("before", sa.Float, nullable=False),
        sa.Column("after", sa.Float, nullable=False),
    )
    op.create_index("memory_q_update_thought", "memory_q_update", ["qtable", "thought"])
    op.create_index("memory_q_update_trajectory", "memory_q_update", ["qtable", "trajectory"])
    op.create_table(
        "memory_verdict",
        sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
        sa.Column("qtable", sa.Integer, sa.ForeignKey("memory_qtable.id"), nullable=False),
        sa.Column("barrier", sa.Integer, nullable=False),
        sa.Column("thought", sa.Integer, nullable=False),
        sa.Column("sound", sa.Boolean, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("judge", sa.String, nullable=False),
        sa.Column("value", sa.Float, nullable=False),
    )
    op.create_table(
        "memory_barrier",
        sa.Column("qtable", sa.Integer, sa.ForeignKey("memory_qtable.id"), primary_key=True, autoincrement=False),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("round", sa.Integer, nullable=False),
        sa.Column("episodes", sa.Integer, nullable=False),
        sa.Column("steps", sa.Integer, nullable=False),
        sa.Column("matched", sa.Integer, nullable=False),
        sa.Column("states", sa.Integer, nullable=False),
        sa.Column("thoughts", sa.Integer, nullable=False),
        sa.Column("updates", sa.Integer, nullable=False),
        sa.Column("snapshot", sa.String, nullable=False),
        sa.Column("time", sa.String, nullable=False),
    )
