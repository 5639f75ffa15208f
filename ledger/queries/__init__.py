"""Questions asked backwards of a log: why, who, what changed, how far it spread, and the least that shows it."""
