"""Predictions before training: where tokens and gradients go, whether a design trains, and what would mend it."""
