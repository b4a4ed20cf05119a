import hashlib,eval as e
for n in e.LAPTOP:
    for s in ("train","test"):
        p=e.load(n,s); print(n,s,len(p),hashlib.sha256(repr(p).encode()).hexdigest()[:12])
