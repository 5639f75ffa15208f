"""What runs beside the engine: the log in memory, and the thread that writes it to disk.

log        gives every event its place, applies it, and keeps it until the writer takes it
writer     takes events to the file in the background
"""
