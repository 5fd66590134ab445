"""Choose heads by training candidates: methods of `locate.methods` that splice and train.

`gates` trains all candidates together behind gates, `trial` trains them one at a time by successive halving.
"""
