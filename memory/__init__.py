"""The agent's memory. It imports neither a simulator nor a trainer."""
