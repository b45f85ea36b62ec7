"""The daemon: it decides and supervises, and holds no driver, engine or numpy."""
