"""What is closed when a command ends: the commands enter it, `app.py` leaves it."""

from contextlib import ExitStack

ending = ExitStack()  # Context managers that are closed when the command ends, however it ends
