"""`kvlb doctor`: holds a configuration against the engines it names, and says what to change.

I/O modules gather facts; `kvlb.doctor.core` judges them, one small check per fault.
"""
