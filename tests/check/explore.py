import sys,time,tempfile
sys.path.insert(0,'/tmp/h/check/tests/check')
from itertools import combinations
from pathlib import Path
import torch; torch.set_num_threads(1)
from scratchlm.check import check_file, find_task
from labelled import *
only=sys.argv[1:]
t0=time.time(); d=Path(tempfile.mkdtemp())
def verdict(task, src):
    p=d/"f.py"; p.write_text(HEAD+src)
    return check_file(p,[find_task(task)])[0]
n=bad=pairs=called=0
for L in LEARNERS:
    if only and L.task not in only: continue
    v=verdict(L.task,L.source)
    if v.state!="right": print("FALSE ALARM",L.task,v.as_json()); continue
    for e in L.edits:
        v=verdict(L.task,L.wrong(e)); n+=1
        if not v.mistake or v.mistake.name!=e[0]: bad+=1; print("MISS",L.task,e[0],'->',v.state,v.mistake and v.mistake.name, v.first and v.first.text, v.failing)
    for (i,a),(j,b) in combinations(enumerate(L.edits),2):
        src=L.wrong(a,b) or L.wrong(b,a)
        if src is None: continue
        v=verdict(L.task,src); pairs+=1
        c= bool(v.state=="right" or (v.mistake and not v.mistake.double))
        if c != ((i,j) in L.hidden): called+=1; print("PAIR",L.task,(i,j),a[0],'+',b[0],'->',v.state,v.mistake and v.mistake.name)
print(n,bad,pairs,called,time.time()-t0)
