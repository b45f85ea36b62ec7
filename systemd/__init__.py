"""Unit files and their companions, as data: `switchgear install-service` writes them."""
