"""The learner: configuration, models, the agent loop, fine-tuning, evaluation, and the ``saga`` command."""
