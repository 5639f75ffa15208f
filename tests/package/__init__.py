"""The built wheel, installed alone: what a user gets who has nothing else."""
