"""Plugins for the frameworks that people train and test with: each module is for one of them, and imports it."""
