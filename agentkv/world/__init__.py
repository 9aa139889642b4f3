"""The agent world."""
