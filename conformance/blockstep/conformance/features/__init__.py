"""Features: one folder each, with all that conformance says about a feature.

The folder itself is the row of the feature (`FEATURE`, see `protocol.feature`), with what is data
about it. Beside it are modules with what is code, each only if the feature has any:

    draws        what it adds to configs and requests, and its actions (`DRAWS`: `draw.feature`)
    goals        its coverage goals, and the steps that reach them (`GOALS`: `judge.goals`)
    properties   its property checks; checks of plans alone (`judge_plan`: `judge.answers`), and why
                 a waiting request is skipped (`GATE`: `judge.gates`)
    worlds       small worlds whose every state is visited (`WORLDS`)

The packages of conformance do not name a feature that has such a folder: they load these modules
for each row of the table (`protocol.features`). A module imports what its package may import, and
no layer above.
"""
