"""Alembic's entry: runs the revisions on the connection, and in the transaction, of :mod:`memory.schema`."""

from alembic import context

from memory.schema import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    transactional_ddl=True,  # SQLite's DDL is transactional, as the driver's own BEGINs are off
)
with context.begin_transaction():
    context.run_migrations()
