import time
import test_accelerate as m
def go(rank, world, root):
    import cProfile, pstats, io
    p = cProfile.Profile(); t = time.time(); out = []
    p.enable()
    job = m.Job(root); out.append(time.time()-t)
    job.train(30); out.append(time.time()-t)
    job.said(); out.append(time.time()-t)
    p.disable()
    s = io.StringIO(); pstats.Stats(p, stream=s).sort_stats("cumtime").print_stats(35)
    return out, s.getvalue()
def test_it(ranks, tmp_path):
    t = time.time()
    for out, text in ranks(2)(go, str(tmp_path)):
        print(out)
    print(text[:6000], time.time()-t)
    t = time.time()
    ranks(2)(go, str(tmp_path))
    print(time.time()-t)
