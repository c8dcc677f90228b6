"""Fuel: a decode engine whose model families are plugins."""
