"""An init service for Android, as data: see README.md beside this file."""
