"""What can be said of a network before it is trained: where its tokens and its gradients go.

`mean_field.py` has the second moments of tokens in theory, `phases.py` closed forms of them and of exponents,
`gradients.py` gradients by layer and kind of weight at any scale. `designs.py` draws trainings of the lab at random,
`calibration.py` has what became of them, `readings.py` what can be read off each before its first step.
"""
