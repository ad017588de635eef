"""The experiment file, typed. The JSON schema and the table of keys in config/README.md are made from these models.

A field's description is what a user reads in the table of keys; `short` is how the field is called in the names of a
sweep's runs (`tp2-mbs8`). Fields annotated with `Formula` also take an expression, such as
`20 * params / (gbs * seq_length)`: in an experiment as read they may still be text, in a planned run they are numbers.
"""
