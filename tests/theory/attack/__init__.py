"""The attack on the theorems: networks drawn and climbed to break a guarantee, checked in hundreds of digits.

`python -m tests.theory.attack --drawn 1000 --climbed 20 --workers 2 -o FILE` goes on where it stopped."""
