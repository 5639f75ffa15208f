"""The fold: the events of one or several logs through the code of the engine, and what the verdicts say of them."""
