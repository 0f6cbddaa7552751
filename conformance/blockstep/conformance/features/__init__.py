"""Features: one folder each, with all that conformance says about a feature.

`__init__` is the row of the feature (`FEATURE`, see `protocol.feature`) and has the data. The other
modules have the code, and exist only if the feature has any:

    draws        additions to configs and requests, and actions (`DRAWS`, see `draw.feature`)
    goals        coverage goals, and the steps that reach them (`GOALS`, see `judge.goals`)
    properties   property checks; checks of plans alone (`judge_plan`, see `judge.answers`); reasons
                 to skip a waiting request (`GATE`, see `judge.gates`); blocks that the feature
                 keeps (`KEEPER`, see `judge.properties.queue_replay`)
    worlds       small worlds, of which `explore` visits all states (`WORLDS`), and events and
                 state of the feature in them (`SCOPE`, see `explore.world`)

The packages of conformance do not name a feature that has such a folder: they load these modules
for each row of the table (`protocol.features`). A module imports what its package may import, and
no layer above.
"""
